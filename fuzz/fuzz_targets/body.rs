//! Feeds random bytes to `body::check`.
#![no_main]

#[path = "../checks/body.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::check(data));
