//! Feeds random bytes to `response::check`.
#![no_main]

#[path = "../checks/response.rs"]
mod response;

libfuzzer_sys::fuzz_target!(|data: &[u8]| response::check(data));
