//! tidegate: a rate-limiting reverse proxy that protects an origin from overload.
//!
//! The modules below are in reading order. Start with [`gateway`], the path of a request from top
//! to bottom: identify the client, find the route, admit or deny, forward or answer.
//!
//! The gateway decides with the pure core: [`identity`] (which client), [`route`] (which policy),
//! [`cost`] (the cost, where only the response tells it) and [`limit`] (may the request pass, and
//! if not, when).
//!
//! It acts through the edges: [`listener`] (bytes become requests), [`budget`] (limits that several
//! gateways share), [`upstream`] (requests to the servers), [`issuer`] (keys that verify tokens)
//! and [`response`] (every response that tidegate itself writes).
//!
//! [`config`] compiles the file into one immutable value. [`server`] wires everything and owns
//! start and drain. [`admin`] and [`telemetry`] are for operators, and [`cli`] is the command line.
//!
//! Imports only point down this list (`tests/it/tidy.rs` enforces it): cli → server → admin →
//! gateway → config → response → (listener | budget | upstream | overload | issuer) →
//! receive_buffer → telemetry → route → identity → cost → limit.

pub mod cli;
pub mod server;
pub mod admin;
pub mod gateway;
pub mod config;
pub mod response;
pub mod listener;
pub mod budget;
pub mod upstream;
pub mod issuer;
pub mod overload;
pub mod receive_buffer;
pub mod body;
pub mod telemetry;
pub mod route;
pub mod identity;
pub mod cost;
pub mod limit;
