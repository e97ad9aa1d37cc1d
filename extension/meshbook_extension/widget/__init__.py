"""The health widget: the ranks of a mesh at a glance, live, also while a cell runs.

    ranks --status query--> MeshSource --Snapshot--> HealthWidget --synced traits--> health.js in the browser
    cells, jobs, errors ------^                          ^---- custom messages: look, interrupt, stacks, pdb, logs, heal

Nothing is asked of the ranks while nobody looks: the browser says which views can be seen, and a look lasts half a
minute unless it is repeated. Everything that came from a rank is put on the page as text, never as HTML.
"""
