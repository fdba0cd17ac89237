"""The command ``geartrain report``: one HTML page about one or several runs."""
