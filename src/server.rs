//! Wires listeners, gateway and admin; owns start order, readiness and drain.
