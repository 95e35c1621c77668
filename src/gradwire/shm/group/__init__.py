"""Operations of a group, as torch.distributed calls them."""
