//! Builds the head of an upstream request.

use http::Version;

use super::{
    request_context::{RequestContext, UpstreamTarget},
    worker::Worker,
};
use crate::upstream::{
    BodyFraming,
    headers::{ContinuedTrace, Outbound},
};

impl Worker {
    /// The request head for the upstream; `None` if the client is not identified yet.
    pub(super) fn outbound<'a>(
        &'a self,
        request: &'a RequestContext<'_>,
        target: &'a UpstreamTarget<'_>,
        framing: BodyFraming,
    ) -> Option<Outbound<'a>> {
        let head = request.head;
        Some(Outbound {
            method: &head.method,
            target: &target.path_and_query,
            framing,
            headers: &head.headers,
            host: target.authority,
            scheme: request.from.scheme(),
            via_version: match head.version {
                Version::HTTP_2 => "2.0",
                Version::HTTP_10 => "1.0",
                _ => "1.1",
            },
            client: &request.decision.attributes.as_ref()?.client,
            traced: request.traced.as_ref().map(|traced| ContinuedTrace {
                traceparent: &traced.traceparent,
                is_root: traced.place.is_root(),
            }),
            managed: &self.active.plan.managed,
            request_id: &request.request_id,
            pseudonym: &self.active.process.pseudonym,
            priority: request.decision.route.priority.stated(),
            over: &request.decision.tags,
            uncompressed: request.decision.route.costs.reads_answer,
            websocket: target.websocket,
            hears: (head.version == Version::HTTP_11).then_some(request.from as _),
            spare: &self.spare,
            custody: None,
        })
    }
}
