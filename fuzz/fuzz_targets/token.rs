//! Feeds random bytes to `token::check`.
#![no_main]

#[path = "../checks/token.rs"]
mod token;

libfuzzer_sys::fuzz_target!(|data: &[u8]| token::check(data));
