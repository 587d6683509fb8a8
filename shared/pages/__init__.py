"""The design system of both programs' pages: templates, style sheets, and a script that keeps pages up to date.

Pages work without the script. Nothing is loaded from other hosts, and nothing is inline: the usual
Content-Security-Policy holds.
"""
