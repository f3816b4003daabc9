//! A route as far as it could be read, and the names that routes may refer to.

use std::ops::Range;

use super::{limit::NamedLimit, upstream::NamedUpstream};
use crate::{config::RouteSettings, overload::Priority, route::Pattern};

/// The names that routes may refer to.
pub(super) struct RouteNames<'a> {
    pub(super) upstreams: &'a [NamedUpstream],
    pub(super) limits: &'a [NamedLimit],
    /// `[gateway] limits`, as indexes.
    pub(super) everywhere: Vec<usize>,
    /// A `[limit]` table is misspelt, so an unknown limit is not reported.
    pub(super) limits_in_doubt: bool,
    /// Likewise for `[upstream]`.
    pub(super) upstreams_in_doubt: bool,
}

/// A route as far as it could be read, with the spans of its parts.
pub(super) struct WrittenRoute {
    /// The route as messages name it.
    pub(super) shown: String,
    pub(super) name: Option<(String, Range<usize>)>,
    /// Its path or a host comes from the environment, so messages must not repeat them.
    pub(super) is_secret: bool,
    pub(super) pattern: Option<Pattern>,
    pub(super) path_span: Range<usize>,
    /// The span of each host.
    pub(super) host_spans: Vec<Range<usize>>,
    pub(super) upstream: Option<usize>,
    pub(super) limits: Vec<usize>,
    pub(super) cost: Option<u64>,
    pub(super) cost_span: Range<usize>,
    pub(super) max_body_bytes: Option<Option<u64>>,
    pub(super) priority: Option<Priority>,
}

impl WrittenRoute {
    pub(super) fn finish(self) -> Option<RouteSettings> {
        Some(RouteSettings {
            name: self.name?.0,
            pattern: self.pattern?,
            upstream: self.upstream?,
            limits: self.limits,
            cost: self.cost?,
            max_body_bytes: self.max_body_bytes?,
            priority: self.priority?,
        })
    }
}
