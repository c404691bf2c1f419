// The index of the search is larger than every page. The theme fetches it at once; this waits until somebody wants to search.
{
  const { open, send } = XMLHttpRequest.prototype;
  // From a search's result (?h=), words are marked, and by ?q= a search begins: both need it.
  const wanted = new Promise((resolve) => {
    if (/[?&][hq]=/.test(location.search)) resolve();
    addEventListener("focusin", (event) => event.target.name === "query" && resolve());
    addEventListener("change", (event) => event.target.id === "__search" && event.target.checked && resolve());
  });
  XMLHttpRequest.prototype.open = function (method, url, ...others) {
    this.awaits = new URL(url, location.href).pathname.endsWith("/search/search_index.json");
    return open.call(this, method, url, ...others);
  };
  XMLHttpRequest.prototype.send = function (...body) {
    if (this.awaits) wanted.then(() => send.apply(this, body));
    else send.apply(this, body);
  };
}
