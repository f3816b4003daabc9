//! Every table and key of the configuration, one record each: type, range, default, documentation.
//!
//! This is the only list. The reader takes ranges and defaults from it and rejects keys that are
//! not in it; the tables of docs/config.md and `tidegate schema` are generated from it.

mod cost;
mod file;
mod identity;
mod limit;
mod listen;
mod prices;
mod process;
mod record;
mod redis;
mod route;
#[cfg(test)]
mod tests;
mod upstream;

pub(super) use cost::{COST, COUNT};
pub(super) use file::FILE;
pub(super) use identity::{
    API_KEY, CLIENT_IP, KEYS_FILE, USER_API_KEY, USER_CLIENT_CERT, USER_HEADER, USER_JWT,
};
pub(super) use limit::{EXEMPT, LIMIT, MAX_BURST, OVERRIDE};
pub(super) use listen::{CERTIFICATE, LISTEN, LISTEN_TLS};
pub(super) use prices::{LONG_PROMPT, MODEL_PRICE};
pub(super) use process::{ADMIN, LOG, OVERLOAD, RESERVE, SERVER, TRACE};
pub(super) use record::{DefaultValue, KeyRecord, Keys, TEXT, ValueKind};
pub(super) use redis::{REDIS, SENTINEL};
pub(super) use route::{GATEWAY, RESPONSE, ROUTE};
pub(super) use upstream::{BREAKER, HEALTH, OUTLIER, UPSTREAM};
