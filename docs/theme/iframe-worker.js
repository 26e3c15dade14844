// Pages that are opened from disk may start no worker: the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      const source = new URL(url, document.baseURI).href;
      inside.document.open();
      inside.document.write(`<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script");
          Object.assign(script, { src: url, onload: done, onerror: failed });
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><body><script src="${source}"><\/script>`);
      inside.document.close();
      this.ready = new Promise((done) => { inside.addEventListener("load", done); });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  };
}
