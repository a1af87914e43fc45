"""A network whose weights are split over several devices, served as one."""
