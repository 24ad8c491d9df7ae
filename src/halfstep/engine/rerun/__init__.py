"""The second run of a block's forward, for `recompute=`."""
