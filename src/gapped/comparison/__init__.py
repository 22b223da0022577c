"""Estimators compared in a training function of the user: runs, records as they finish, a verdict, a page.

Nothing of it is imported here: records and tables are read without torch.
"""

from gapped.errors import require

require("gapped.compare", "filelock", "jinja2", "numpy", "rich", "scipy")
