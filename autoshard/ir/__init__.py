"""The intermediate representation: typed fx graphs, the parameter table and the Program."""
