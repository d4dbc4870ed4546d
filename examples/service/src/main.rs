//! `ascend-llm-service MODEL [ADDRESS]`: serves a model until Ctrl-C, then waits up to ten seconds for running requests.

use std::time::Duration;

use ascend_llm::Engine;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: ascend-llm-service MODEL [ADDRESS]")?;
    let listener = tokio::net::TcpListener::bind(args.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned())).await?;
    let engine = Engine::builder(model).build()?;
    println!("{} on http://{}", engine.info().device_description, listener.local_addr()?);
    let closing = engine.clone();
    axum::serve(listener, ascend_llm_service::router(engine.clone()))
        .with_graceful_shutdown(async move {
            let _ = tokio::signal::ctrl_c().await;
            closing.close();
        })
        .await?;
    engine.shutdown_async(Duration::from_secs(10)).await?;
    Ok(())
}
