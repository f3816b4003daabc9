# A static binary in an empty image. Build: docker build -t tidegate .

FROM rust:1.95-alpine AS build
# the build compiles the TLS library and the allocator from C and assembly
RUN apk add --no-cache build-base ca-certificates linux-headers perl
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src ./src
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    target=$(uname -m)-unknown-linux-musl && \
    cargo build --release --locked --target "$target" && \
    cp "target/$target/release/tidegate" /tidegate

FROM scratch AS runtime
# root certificates, to verify upstreams, Redis and JWT issuers
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /tidegate /tidegate
# the user nobody, so listen on ports above 1024
USER 65534:65534
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=2s --start-period=5s CMD ["/tidegate", "healthcheck"]
ENTRYPOINT ["/tidegate"]
CMD ["run", "--config", "/etc/tidegate/gateway.toml"]
