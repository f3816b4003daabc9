//! The judge of shared and local limits, its own tests, and the runs that it judges.

mod calibration;
mod clients;
mod losses;
mod plan;
mod property;
mod refusals;
mod set;
mod table;
mod verdicts;
mod workplace;
