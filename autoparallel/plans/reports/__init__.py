"""Reports of a plan, as text, JSON, page and trace, all from one `Report`. See README.md."""
