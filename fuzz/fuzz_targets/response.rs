//! `response::check` for random bytes.
#![no_main]

#[path = "../checks/response.rs"]
mod response;

libfuzzer_sys::fuzz_target!(|data: &[u8]| response::check(data));
