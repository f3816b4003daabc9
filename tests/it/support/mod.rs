//! The vocabulary of the tests: a gateway, an origin, requests and their results.
//!
//! Everything here blocks, so that a test reads from top to bottom. The programs under test are
//! other processes or threads. Every wait is bounded, the system chooses every port, and every
//! child process ends on drop.

pub mod browser;
pub mod cli;
pub mod collector;
pub mod curl;
pub mod far_redis;
pub mod frames;
pub mod gateway;
pub mod grpc;
pub mod h2c;
pub mod http;
pub mod http2;
pub mod judge;
pub mod metrics;
pub mod origin;
pub mod random;
pub mod raw;
pub mod redis;
pub mod secured;
pub mod signal;
pub mod tls;
pub mod tokens;
pub mod wait;
pub mod websocket;

pub use self::redis::Redis;
pub use cli::tidegate;
pub use gateway::Gateway;
pub use http::{Broken, Client, Request, Response};
pub use origin::{Origin, Seen};
pub use wait::{Gate, eventually};
