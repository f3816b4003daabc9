//! Shares the servers and waiting helpers of the tests.

#[path = "../../tests/it/support/redis.rs"]
pub mod redis;
#[path = "../../tests/it/support/signal.rs"]
pub mod signal;
#[path = "../../tests/it/support/wait.rs"]
pub mod wait;
