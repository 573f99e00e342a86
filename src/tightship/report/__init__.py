"""Reports: a plan to something to look at. Nothing here decides or measures; every number is the plan's."""
