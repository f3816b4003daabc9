//! The judge of shared and local limits, its own tests, and the runs that it judges.

mod calibration;
