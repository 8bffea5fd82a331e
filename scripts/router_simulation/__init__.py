"""The real router against a modelled worker and a virtual clock."""
