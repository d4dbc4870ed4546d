//! HTTP service around the engine: SSE streaming, cancellation on disconnect, typed errors.

use ascend_llm::{Engine, ErrorKind, GenerateError, Request, SamplingParams};
use axum::extract::{State, rejection::JsonRejection};
use axum::response::{IntoResponse, Response, sse::Event, sse::Sse};
use axum::{Json, Router, http::StatusCode, routing::post};
use futures_util::StreamExt as _;

#[derive(serde::Deserialize)]
struct Body {
    prompt: String,
    #[serde(default)]
    stream: bool,
    #[serde(flatten)]
    sampling: SamplingParams,
}

#[derive(serde::Serialize)]
struct ApiError {
    kind: ErrorKind,
    message: String,
}

impl<E: Into<GenerateError>> From<E> for ApiError {
    fn from(error: E) -> Self {
        let error = error.into();
        Self { kind: error.kind(), message: error.to_string() }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(serde_json::json!({ "error": self }))).into_response()
    }
}

async fn generate(State(engine): State<Engine>, body: Result<Json<Body>, JsonRejection>) -> Result<Response, ApiError> {
    let invalid = |error: JsonRejection| ApiError { kind: ErrorKind::InvalidRequest, message: error.body_text() };
    let Json(Body { prompt, stream, sampling }) = body.map_err(invalid)?;
    // axum drops the handle when the client disconnects, which cancels the request.
    let handle = engine.submit(Request::text(prompt).with_sampling(sampling))?;
    if !stream {
        return Ok(Json(handle.output().await?).into_response());
    }
    Ok(Sse::new(handle.map(|item| match item {
        Ok(delta) => Event::default().json_data(&delta),
        Err(error) => Event::default().event("error").json_data(ApiError::from(error)),
    }))
    .into_response())
}

/// Routes of the service: `POST /generate` takes a prompt and sampling parameters, and streams with `"stream": true`.
pub fn router(engine: Engine) -> Router {
    Router::new().route("/generate", post(generate)).with_state(engine)
}
