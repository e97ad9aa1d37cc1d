"""The Meshbook kernel: IPython's kernel with the mesh extension loaded and the first mesh one fork away.

Start it through Jupyter (kernelspec ``meshbook``) or with ``python -m meshbook_kernel -f CONNECTION_FILE``;
``meshbook kernel install`` registers the kernelspec.
"""
