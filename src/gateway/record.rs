//! What is noted of a request when its answer ends: the counters, the durations, the access line.

use std::{
    cell::RefCell,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::StatusCode;
use tokio::time::Instant;

use super::{Exchange, Worker, body::BodyError};
use crate::telemetry::{
    AccessLog, RouteMetrics, UpstreamMetrics,
    access::{LimitPart, Line},
};

/// A response on its way to the client.
#[derive(Debug)]
pub(super) struct Record {
    metrics: Arc<RouteMetrics>,
    upstream: Arc<UpstreamMetrics>,
    arrived: Instant,
    bytes: u64,
    _in_flight: crate::telemetry::InFlight,
    /// Only where every request gets an access line.
    line: Option<Box<Later>>,
}
