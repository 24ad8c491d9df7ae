"""Files under check: reading, notebooks, suppression comments, which files a path means."""
