"""pdb and debugpy on ranks; the person's end of both is of `meshbook.mesh`."""
