"""Print the reference page of recipe fields: ``python -m blockdraft.recipes > docs/reference/recipe-fields.md``."""

from blockdraft.recipes import reference_page

print(reference_page(), end="")
