"""The real scheduler against a modelled worker and a virtual clock."""
