//! Feeds random bytes to `address::proxy_v1`.
#![no_main]

#[path = "../checks/address.rs"]
#[allow(dead_code, reason = "each target runs one of the checks")]
mod address;

libfuzzer_sys::fuzz_target!(|data: &[u8]| address::proxy_v1(data));
