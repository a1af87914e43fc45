"""One client that sends expensive inputs beside many that behave well."""
