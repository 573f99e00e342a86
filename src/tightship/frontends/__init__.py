"""Something real -> Graph. Each front end is a module or package of its own."""
