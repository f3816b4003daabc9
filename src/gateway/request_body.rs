//! The body of a live request, as a decision reads it.

use bytes::Bytes;

use super::{
    body_source::{BodyBounds, BodySource},
    refusals,
    request_context::RequestContext,
    worker::Worker,
};
use crate::{identity::Prefixes, listener::inbound::InboundBody, response::Refusal};

/// A body that arrives while its request is served.
#[derive(Debug)]
pub(super) struct LiveBody<'b> {
    pub(super) worker: &'b Worker,
    pub(super) body: &'b mut InboundBody,
}

impl BodySource for LiveBody<'_> {
    fn bound(&mut self, bounds: BodyBounds) {
        self.body.set_max_bytes(bounds.max_bytes);
        if bounds.per_message {
            self.body.bound_messages();
        }
    }

    fn fault(&self) -> Option<Refusal> {
        self.body.is_too_large().then_some(Refusal::BodyTooLarge)
    }

    fn is_empty(&self) -> bool {
        self.body.has_ended()
    }

    async fn read_ahead(
        &mut self,
        request: &RequestContext<'_>,
        most: usize,
    ) -> Result<Option<Bytes>, Refusal> {
        let attributes = request.attributes();
        let address = attributes.map_or(request.from.ip, |asked| asked.client.address);
        let client = Prefixes::default().aggregate(address);
        let buffers = &self.worker.active.process.body_buffers;
        let read = self.body.read_ahead(most, buffers, client);
        let read = Box::pin(self.worker.while_client_stays(request, read)).await;
        read.map_err(|error| refusals::bad_body(&error))
    }

    fn replace_beginning(&mut self, beginning: Bytes, replaced: usize) {
        self.body.replace_beginning(beginning, replaced);
    }
}
