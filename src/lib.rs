//! tidegate: a reverse proxy that protects an origin from being overrun.
//!
//! A request takes this path, and the modules below stand in the order in which it is read best:
//! [`gateway`] is the path itself, top to bottom: identify the client, find the route, admit or deny,
//! forward or answer. What it decides with is the pure core: [`identity`] (whom we count), [`route`] (which
//! policy applies), [`cost`] (what it costs, where only the answer tells) and [`limit`] (may it
//! pass, and if not, when). What it acts through are the edges:
//! [`listener`] (bytes become requests), [`budget`] (one allowance for several gateways),
//! [`upstream`] (the request leaves), [`issuer`] (keys of tokens are fetched), [`response`] (every answer that we
//! author). [`config`] turns text into one immutable value, [`server`] wires everything and owns start and
//! drain, [`admin`] and [`telemetry`] let an operator see, [`cli`] is what a person types.
//!
//! Imports point down this list only (`tests/it/tidy.rs` enforces it):
//! cli → server → admin → gateway → config → response → (listener | budget | upstream | overload | issuer) → receive_buffer → telemetry → route → identity → cost → limit.

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
pub mod telemetry;
pub mod route;
pub mod identity;
pub mod cost;
pub mod limit;
