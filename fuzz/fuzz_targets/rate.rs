//! Feeds random bytes to `configuration::rate`.
#![no_main]

#[path = "../checks/configuration.rs"]
#[allow(dead_code, reason = "each target runs one of the checks")]
mod configuration;

libfuzzer_sys::fuzz_target!(|data: &[u8]| configuration::rate(data));
