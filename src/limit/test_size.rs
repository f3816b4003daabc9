//! How many samples a random test draws: a tenth while somebody works, all in a full run (tests).

use std::env;

/// `full` in a full run, else a tenth of it. `scripts/test` sets `TIDEGATE_FULL_TESTS` and so does
/// the full run; plain `cargo test` is for the loop of edit and test, and must take seconds.
pub(super) fn samples(full: u32) -> u32 {
    match env::var_os("TIDEGATE_FULL_TESTS") {
        Some(_) => full,
        None => full / 10,
    }
}
