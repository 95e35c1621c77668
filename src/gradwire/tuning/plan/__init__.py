"""`gradwire plan`: prediction of a step on other links and numbers of ranks, for each hook."""
