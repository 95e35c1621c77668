"""`gradwire plan`: what a step would take on other links, with more ranks, by each hook."""
