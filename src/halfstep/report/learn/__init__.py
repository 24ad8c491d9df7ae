"""The course rendered: text and plain data of `halfstep learn`, and docs/learn.md."""
