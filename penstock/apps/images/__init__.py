"""Things in pictures: a folder of class-named folders in, the name of what is seen out."""
