"""An algorithm and an environment of another package, for rsipo-lightning."""
