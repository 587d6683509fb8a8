"""Charts as SVG, from plain data: pure functions, no style attributes, bounded output, every text escaped.

Colors, fonts and hover effects are classes, defined in `shared/pages/static/charts.css`.
"""
