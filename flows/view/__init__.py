"""The page of `sluice view`: a local, read-only web server over what runs keep of their steps."""
