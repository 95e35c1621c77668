"""Arguments: groups and ranks, sizes, reduce ops, lists, what torch.func allows."""
