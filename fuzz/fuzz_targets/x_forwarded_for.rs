//! Feeds random bytes to `address::x_forwarded_for`.
#![no_main]

#[path = "../checks/address.rs"]
#[allow(dead_code, reason = "each target runs one of the checks")]
mod address;

libfuzzer_sys::fuzz_target!(|data: &[u8]| address::x_forwarded_for(data));
