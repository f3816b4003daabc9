//! The servers of the tests, and how those wait.

#[path = "../../tests/it/support/redis.rs"]
pub mod redis;
#[path = "../../tests/it/support/signal.rs"]
pub mod signal;
#[path = "../../tests/it/support/wait.rs"]
pub mod wait;
