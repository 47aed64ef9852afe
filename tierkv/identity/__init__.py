"""What state is and whose it is: layer groups, page sizes, namespaces and page keys."""
