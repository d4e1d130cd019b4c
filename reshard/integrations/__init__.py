"""Integrations with training frameworks. Each module imports its framework; no other module of this
package imports them.
"""
