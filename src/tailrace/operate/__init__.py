"""Alerts, dashboards and diagnosis; empty in this version."""
