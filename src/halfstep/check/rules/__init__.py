"""The rules, one file per family; `halfstep.check.registry` lists them."""
